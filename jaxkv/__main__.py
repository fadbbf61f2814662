"""`python -m jaxkv`."""

from jaxkv.cli import main

raise SystemExit(main())
