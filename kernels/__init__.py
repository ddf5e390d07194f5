"""How tritonamp runs: one operation a file, each with its eager twin.

Installed as ``tritonamp.kernels``; a top-level module named ``kernels`` would shadow other
packages.
"""

if __name__ != "tritonamp.kernels":
    raise ImportError(
        f"this folder is the package 'tritonamp.kernels', imported here as {__name__!r}: "
        "install the project (pip install -e .) and import tritonamp.kernels"
    )
