"""``python -m tritonamp migrate``: training scripts for torch.amp or apex, rewritten for tritonamp.

Data flows one way. A text is parsed once (``source``), its names are told apart (``scopes``) and
followed from where they are made to where they are used (``flow``). On these stand the rewritings:
``apex_imports``, ``apex_loop`` and ``torch_loop`` (which finds model and optimizer by ``owners``),
``conditions`` (branches that become one) and ``old_names``. Each notes edits of exact spans of the
text, the reason of each, and what it did not understand, in a ``Script``. ``convert`` runs them and
gives back a ``Conversion``; ``command`` reads files, prints and writes.

One thing that is not understood refuses the whole file: a half-converted loop trains wrong.
"""
