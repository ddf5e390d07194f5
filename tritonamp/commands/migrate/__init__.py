"""``python -m tritonamp migrate``: training scripts for torch.amp or apex, rewritten for tritonamp.

Data flows one way:

    script (text, names) -> the objects of its loop -> the table -> edits, or a list of to-dos

``script`` parses a text once (``text``), knows what its names mean (``names``), and collects edits
of exact spans, with a reason each. ``torch_loop`` and ``apex_loop`` find the objects of one loop in
one function or class (``objects``), and what meets its gradients (``gradients``). ``table`` says
what each call of both dialects becomes; ``imports`` renames what is left. ``convert`` runs them,
``command`` reads files, prints and writes.

What is not certain raises ``Refused``. The file stays as it is then, since a half-converted loop
trains wrong, and each line that the table knows is listed with what to write there.
"""
