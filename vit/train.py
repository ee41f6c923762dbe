"""Train one vision transformer: `python -m vit.train --weight_decay 0.04 --drop_path 0.1` (`vit.command`).

Only the interpreter runs this file. Nothing imports it, because `vit.train` is the function.
"""

import sys

from vit.command import main

if __name__ == "__main__":
    sys.exit(main())
