"""What released versions have written, kept for the tests of all later ones (docs/decisions/023-formats.md).

Made once, by the code of that version, and never changed:

    git worktree add /tmp/marq-0.1 e0b5991
    python -m tests.golden.make /tmp/marq-0.1 0.1
"""
