"""What a fit prints, read back."""

HEADER = ["epoch", "train_loss", "valid_loss", "accuracy", "time"]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a printed text, each a list of rows, each a list of cells; the first row is the header."""
    found: list[list[list[str]]] = []
    for line in text.splitlines():
        cells = line.split()
        if cells[:2] == HEADER[:2]:
            found.append([cells])
        elif found and cells and cells[0].isdigit() and len(cells) == len(found[-1][0]):
            found[-1].append(cells)
    return found
