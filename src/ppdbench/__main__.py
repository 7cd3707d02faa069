"""``python -m ppdbench`` is ``ppd``."""

from ppdbench.cli.app import main

if __name__ == "__main__":
    main()
