"""tritonamp inside other training libraries: ``lightning``, ``accelerate``, ``transformers``.

Each is imported by name and needs its library; nothing here is imported by ``import tritonamp``.
"""
