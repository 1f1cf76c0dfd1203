"""The float64 recurrences beside the plugin tests serve the layers too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))
