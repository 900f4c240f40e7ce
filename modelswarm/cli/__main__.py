"""`python -m modelswarm.cli`."""

from modelswarm.cli import main

if __name__ == "__main__":
    main()
