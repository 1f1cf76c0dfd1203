"""``tune``: which window, dtypes and kernel variant suit a model's recurrent layers on the GPU at hand.

``subject`` reads the layers, ``candidate`` lists what can be chosen, ``layer`` puts one layer to work alone, ``timing`` and
``drift`` measure it, ``choice`` weighs the results, ``tuned`` is the file that ``build`` reads. Nothing here runs a model.
"""
