"""``python -m tritonamp migrate``: training scripts for torch.amp or apex, rewritten for tritonamp.

Data flows one way. ``reading``: a text is parsed once (``source``), its names are told apart
(``scopes``) and followed from where they are made to where they are used (``flow``). ``torch_amp``
and ``apex_amp`` rewrite a loop each, by what they share in ``loops``: whose parameters an optimizer
steps (``owners``), what turns mixed precision on (``switch``), what meets scaled gradients
(``gradients``), branches that become one (``conditions``). Each notes edits of exact spans of the
text, the reason of each, and what it did not understand, in a ``Script``. ``convert`` runs them and
gives back a ``Conversion``; ``command`` reads files, prints and writes.

One thing that is not understood refuses the whole file: a half-converted loop trains wrong.
"""
