"""`python -m app …`: the same as `faust -A app …`."""

from app.commands import main

if __name__ == "__main__":
    main()
