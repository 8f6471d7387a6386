"""Words in lines for people."""


def counted(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`: a count with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
