#!/bin/sh
# pages.sh PYTHON SOURCE BUILD: makes HTML of the pages, with the reference that the build writes; any warning fails. Exits 77 where
# Sphinx, its Markdown parser or the Python package is missing. The result is BUILD/docs/html/docs/index.html.
set -eu
python=$1 source=$2 build=$3
export PYTHONPATH="$build/bindings/python"

for module in sphinx myst_parser glm52; do
    "$python" -c "import $module" 2>/dev/null || { echo "skipped: there is no $module"; exit 77; }
done
rm -rf "$build/docs"
"$python" "$source/tests/docs/stage.py" "$source" "$build" "$build/docs/tree"
"$python" -m sphinx -q -W --keep-going -b html -d "$build/docs/doctrees" -c "$source/docs" "$build/docs/tree" "$build/docs/html"
