"""``python -m tritonamp migrate``: changes to scripts for torch.amp or apex.

``source`` parses a text once; ``script`` collects edits of exact spans, each with a reason.
``imports`` edits names and imports, which is certain. ``torch_loop`` and ``apex_loop`` edit loops,
which is a list for a person. ``convert`` calls them; ``command`` reads, prints and writes files.
"""
