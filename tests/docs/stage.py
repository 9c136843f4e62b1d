"""stage.py SOURCE BUILD STAGE: lays out the tree that Sphinx reads: the repository's pages by links, and the reference
pages that are made from the description of the C API, from the docstrings of the Python package and from the schema of
options."""
import inspect
import os
import re
import shutil
import sys


def link(source, stage):
    shutil.rmtree(stage, ignore_errors=True)
    os.makedirs(os.path.join(stage, "docs", "reference"))
    for name in os.listdir(source):  # what pages link to lies where it lies in the repository
        if name != "docs" and not name.startswith((".", "build")):
            os.symlink(os.path.join(source, name), os.path.join(stage, name))
    for folder in ("docs", os.path.join("docs", "reference")):
        for name in os.listdir(os.path.join(source, folder)):
            path = os.path.join(source, folder, name)
            if os.path.isfile(path):
                os.symlink(path, os.path.join(stage, folder, name))


def signature(thing):
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return ""
    return text.replace("self, ", "").replace("(self)", "()")


def member(name, thing):
    if isinstance(thing, property):
        return f"#### {name}\n\n```text\n{inspect.getdoc(thing) or ''}\n```\n\n"
    call = thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing
    return f"#### {name}\n\n```text\n{name}{signature(call)}\n\n{inspect.getdoc(call) or ''}\n```\n\n"


def public(kind):
    named = [(n, t) for n, t in vars(kind).items()
             if not n.startswith("_") and (callable(t) or isinstance(t, (property, classmethod)))]
    return [(n, t) for n, t in named if inspect.getdoc(t.__func__ if isinstance(t, classmethod) else t)]


def python_page():
    import glm52

    out = ["# Reference of the Python package\n\nWritten from the docstrings of `glm52` at every build; "
           "[the guide](../python.md) says how the parts go together.\n\n"]
    things = [(name, getattr(glm52, name)) for name in glm52.__all__]
    errors = [(n, t) for n, t in things if inspect.isclass(t) and issubclass(t, glm52.Error)]
    classes = [(n, t) for n, t in things if inspect.isclass(t) and not issubclass(t, glm52.Error)]
    functions = [(n, t) for n, t in things if not inspect.isclass(t)]
    out.append("## Functions\n\n")
    out += [member(name, thing).replace("####", "###", 1) for name, thing in functions]
    out.append("## Classes\n\n")
    for name, kind in classes:
        out.append(f"### {name}\n\n```text\n{name}{signature(kind)}\n\n{inspect.getdoc(kind)}\n```\n\n")
        out += [member(*pair) for pair in public(kind)]
    out.append("## Exceptions\n\n| class | also | status | when |\n| --- | --- | --- | --- |\n")
    for name, kind in errors:
        also = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not glm52.Error)
        out.append(f"| `{name}` | {also} | `{kind.name}` | {inspect.getdoc(kind).splitlines()[0]} |\n")
    return "".join(out)


def options_page():
    import glm52

    out = ["# Options\n\nWritten from the schema of the library at every build; `glm52 config`, `glm52.options()` and "
           "`glm52_config_describe()` list the same.\n"]
    section = None
    for option in glm52.options():
        here = option.key.split(".")[0] if "." in option.key else "beside the sections"
        if here != section:
            out.append(f"\n## {here}\n\n| option | type | range | default | meaning |\n")
            out.append("| --- | --- | --- | --- | --- |\n")
            section = here
        cells = [f"`{option.key}`", option.type, option.range, option.default, option.summary]
        out.append("| " + " | ".join(re.sub(r"[|<*]", r"\\\g<0>", cell) for cell in cells) + " |\n")
    return "".join(out)


def main(source, build, stage):
    link(source, stage)
    shutil.copy(os.path.join(build, "abi", "api.md"), os.path.join(stage, "docs", "reference", "c.md"))
    for name, page in (("python", python_page), ("options", options_page)):
        with open(os.path.join(stage, "docs", "reference", name + ".md"), "w", encoding="utf-8") as file:
            file.write(page())


main(*(os.path.abspath(path) for path in sys.argv[1:4]))
