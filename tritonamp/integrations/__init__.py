"""tritonamp inside ``lightning``, ``fabric`` (Lightning's), ``accelerate`` and ``transformers``.

Import each by name; it needs its library. ``import tritonamp`` imports none of them.
"""
