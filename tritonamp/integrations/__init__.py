"""tritonamp inside other training libraries: ``lightning``, ``accelerate``, ``transformers``.

Import each by name; it needs its library. ``import tritonamp`` imports none of them.
"""
