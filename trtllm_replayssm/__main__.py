"""``python -m trtllm_replayssm``: the command line without an installed script."""

import sys

from trtllm_replayssm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
