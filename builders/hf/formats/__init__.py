"""How quantised weights are stored: one file per format, each turning a module's tensors into float32 rows."""
