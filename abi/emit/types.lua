-- The types of the Python module: the functions that are written by hand, from a file, and those of the description.
return require("emit.python").types
