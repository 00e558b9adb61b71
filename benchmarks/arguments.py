"""What benchmarks of several models take on the command line."""

import argparse
from pathlib import Path


def words_and_results(description: str | None, results: Path) -> argparse.ArgumentParser:
    """Words that choose among the models, and where the figures go."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--results", type=Path, default=results)
    return parser
