"""``python -m tritonamp migrate``: what to write in scripts for torch.amp or apex.

Read ``source``, ``script``, ``imports``, ``torch_loop``, ``apex_loop``, ``command``.
"""
