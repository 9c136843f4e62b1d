"""The plan of a step: memory by class and FLOPs by operation, from a dry run."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple


class Row(NamedTuple):
    """section "memory": amount is bytes of the class `name`. section "flops": amount is FLOPs of the operation in one
    step, calls how often it ran, bytes what it read and wrote."""

    section: str
    name: str
    amount: float
    bytes: float
    calls: int


def count(value: float, units: str = " KMGTPE", base: float = 1000.0) -> str:
    """1234567 as "1.2M"."""
    index = 0
    while value >= 999.5 and index < len(units) - 1:
        value, index = value / base, index + 1
    number = f"{value:.0f}" if value >= 99.5 or index == 0 else f"{value:.1f}"
    return (number + units[index]).strip()


class Plan:
    """Rows of a plan; print() shows a table, to_pandas() gives a DataFrame."""

    def __init__(self, rows: List[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def memory(self) -> Dict[str, int]:
        """Bytes by class; "peak" is the most at one time."""
        return {row.name: int(row.amount) for row in self.rows if row.section == "memory"}

    @property
    def peak(self) -> int:
        """Bytes at most at one time."""
        return self.memory["peak"]

    @property
    def flops(self) -> float:
        """FLOPs of one step with full microbatches."""
        return sum(row.amount for row in self.rows if row.section == "flops")

    def to_pandas(self) -> Any:
        """A DataFrame with a row per row; needs pandas."""
        import pandas

        return pandas.DataFrame(self.rows, columns=Row._fields)

    def _table(self, most: int = 12) -> List[List[str]]:
        memory = [["memory", row.name, count(row.amount) + "B", "", ""] for row in self.rows
                  if row.section == "memory" and row.amount]
        work = sorted((row for row in self.rows if row.section == "flops"), key=lambda row: -row.amount)
        flops = [["flops", row.name, count(row.amount), count(row.bytes) + "B", str(row.calls)] for row in work[:most]]
        rest = work[most:]
        if rest:
            flops.append(["flops", f"{len(rest)} more", count(sum(r.amount for r in rest)),
                          count(sum(r.bytes for r in rest)) + "B", str(sum(r.calls for r in rest))])
        return memory + flops + [["flops", "all", count(self.flops), "", ""]]

    def __repr__(self) -> str:
        rows = [["", "", "amount", "moved", "calls"], *self._table()]
        width = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = []
        for row in rows:
            cells = [f"{row[0]:<{width[0]}}", f"{row[1]:<{width[1]}}"] + [f"{row[i]:>{width[i]}}" for i in (2, 3, 4)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in self._table())
        return f"<table><tr><th></th><th></th><th>amount</th><th>moved</th><th>calls</th></tr>{rows}</table>"
