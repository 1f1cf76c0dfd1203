"""The plugin layers as TensorRT plugins that need neither a library nor Python at run time.

``definitions`` is the table of the five layers, ``quick`` turns a row of it into a plugin of ``tensorrt.plugin`` whose
kernel is compiled ahead of time, ``symbolic`` lets the launch records of ``plugins/device`` speak of sizes that are only known
when the engine runs. TensorRT is imported when plugins are registered, not before.
"""
