-- The SWIG fragment of the Python module.
return require("emit.python").swig
