"""`python -m marq.cli`: the same as `marq`."""

from marq.cli.main import main

if __name__ == "__main__":
    main()
