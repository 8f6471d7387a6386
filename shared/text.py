"""Words in lines for people."""


def counted(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`: a count with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def bounded(text: str, most: int = 512) -> str:
    """What a message takes of a text that anybody wrote: its first `most` characters, no NUL among them."""
    return text[:most].replace("\0", "\N{REPLACEMENT CHARACTER}")
