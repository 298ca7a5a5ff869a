"""Text to train on that comes with no files."""

from pathlib import Path


def write_functions(folder: Path, files: int, lines: int) -> None:
    """Make a folder of Python files, each of so many one-line functions."""
    folder.mkdir()
    for k in range(files):
        text = [f"def function_{k}_{j}(value): return value + {j}" for j in range(lines)]
        (folder / f"{k}.py").write_text("\n".join(text))
