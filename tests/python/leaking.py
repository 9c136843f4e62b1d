"""leaking.py LIBRARY: loses a context. For leaks.sh, which must say so."""
import ctypes
import sys

library = ctypes.CDLL(sys.argv[1])


def lose():
    context = ctypes.c_void_p()
    assert library.glm52_context_create(None, ctypes.byref(context)) == 0


for _ in range(10):  # one could still be found in a register
    lose()
