"""Build the site of these pages: ``pip install -e '.[docs]' && python nbs/build.py``.

The site is written to `nbs/_build/html`, from the beginning each time. A warning is an error. No other host is asked
for anything, neither here nor when a page is opened.
"""

import argparse
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> int:
    """Build the site and say where it is; return 0 if there was no warning."""
    parser = argparse.ArgumentParser(description="Build the site of the documentation; a warning is an error.")
    parser.add_argument("--out", type=Path, default=HERE / "_build", metavar="D", help="write to D/html (nbs/_build)")
    out = parser.parse_args(argv).out.resolve()
    try:
        from sphinx.cmd.build import build_main
    except ImportError as error:
        print(f"{error}: pip install -e '.[docs]' installs what the site is built with", file=sys.stderr)
        return 1
    html = out / "html"
    for folder in (html, out / "doctrees"):  # a page that is gone must not stay, nor a warning be forgotten
        shutil.rmtree(folder, ignore_errors=True)
    code = build_main(["-b", "html", "-W", "--keep-going", "-q", "-d", str(out / "doctrees"), str(HERE), str(html)])
    if code:
        print("the site was built with warnings, which are listed above: fix them, and build again", file=sys.stderr)
        return code
    size = sum(file.stat().st_size for file in html.rglob("*") if file.is_file())
    print(f"the site is in {html} ({size / 2**20:.1f} MiB): open {(html / 'index.html').as_uri()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
