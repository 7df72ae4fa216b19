"""The name that was meant, where there is none of the one that was given."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggested(name: object, names: Iterable[str]) -> str:
    """Return ` Did you mean ...?`, of the name that is most like a wrong one; empty: none is."""
    near = difflib.get_close_matches(str(name), [*names], n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def there_are(name: object, names: Iterable[str]) -> str:
    """Return the same, and all names that there are."""
    names = sorted(names)
    return f"{suggested(name, names)} There are: {', '.join(names) or 'none'}"
