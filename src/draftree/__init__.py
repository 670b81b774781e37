"""Lossless speculative decoding with draft trees that change shape at every step.

engine = draftree.load_engine("smollm2")
for chunk in engine.stream(draftree.user("Why is the sky blue?")):
    print(chunk.text, end="", flush=True)

The first use of a name loads all of them (``public.py``), but none of them torch. So other engines can import what
needs neither (``integrations/other_engines.py``), whatever release of transformers they bring.
"""

from importlib import import_module

TYPE_CHECKING = False  # typing takes longer to load than all else here, and Ctrl-C must find its handler
if TYPE_CHECKING:
    from .public import *  # noqa: F403

    __all__: list[str]


def __getattr__(name: str) -> object:
    public = import_module(".public", __name__)
    if name == "__all__":
        return public.NAMES
    if name not in public.NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(public, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})  # type: ignore[misc]
