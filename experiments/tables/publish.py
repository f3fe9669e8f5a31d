"""Sheet -> files: the table as markdown, CSV and LaTeX, and the picture."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from experiments.running import folders
from experiments.tables import formats
from experiments.tables.layout import Sheet
from experiments.tables.plot import plot


def publish(sheet: Sheet, out: Path) -> list[Path]:
    folders.make(out)
    texts = {
        "table.md": formats.markdown(sheet),
        "table.csv": formats.comma_separated(sheet),
        "table.tex": formats.latex(sheet),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    plot(sheet, out / "plot.png")
    return [*(out / name for name in texts), out / "plot.png"]


def show(sheet: Sheet, paths: list[Path]) -> None:
    """Prints the table and where its files are."""
    console = Console(highlight=False)
    # A file or a pipe is not a narrow terminal: there nothing should be cut or wrapped.
    if not console.is_terminal:
        console = Console(highlight=False, width=240)
    console.print(formats.terminal(sheet, console.width))
    for path in paths:
        console.print(Text(str(path)))
