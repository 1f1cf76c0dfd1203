"""The op vocabulary in which models are written, and the backends that carry it out.

``base.Network`` states every op: its meaning, its shapes, its checks. A backend implements the ``_op`` methods:
``torch_backend.TorchNetwork`` runs them at once on torch tensors. Nothing here knows a model family or an engine folder.
"""
