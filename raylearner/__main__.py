"""`python -m raylearner`."""

from raylearner.cli import main

if __name__ == "__main__":
    main()
