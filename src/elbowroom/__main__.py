"""`python -m elbowroom` is the command line."""

from elbowroom.cli.main import main

if __name__ == "__main__":
    main()
