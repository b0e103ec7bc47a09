"""Write the generated part of README.md: the table of variables, from `inference_worker.config`."""

from __future__ import annotations

import re
from pathlib import Path

from inference_worker.config import to_markdown

README = Path(__file__).parent.parent / "README.md"


def main() -> None:
    """Replace what stands between the markers."""
    text = README.read_text()
    block = f"<!-- variables -->\n\n{to_markdown()}\n<!-- /variables -->"
    README.write_text(re.sub(r"<!-- variables -->.*<!-- /variables -->", lambda _: block, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
