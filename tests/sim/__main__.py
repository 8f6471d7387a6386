"""`python -m tests.sim SEED`: play one scenario again and print everything that happens in it."""

import sys
from collections import deque

from tests.sim import world


def main(seed: int) -> int:
    """See above; the exit code says whether it held."""
    with world.world(seed) as played:
        played.log = deque()
        sys.stdout.write(f"{played.faults}\n")
        try:
            played.run()
        except AssertionError as error:
            sys.stdout.write(f"{played.story(len(played.log))}\n\n{error}\n")
            return 1
    sys.stdout.write(f"{played.story(len(played.log))}\n\nheld: {dict(played.happened)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
