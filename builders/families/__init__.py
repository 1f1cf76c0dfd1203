"""Model families: one short file each, that reads a config and names the tensors.

A family knows config keys and tensor names; sizes go into layers (builders/layers), names into sources. Computation lives
in the layers alone.
"""
