"""Megatron extension: what pretraining teams add to their Megatron to get what it lacks.

>>> import megatron_ext
>>> megatron_ext.install()   # before the script imports Megatron; see megatron_ext/install.py

Importing this package is cheap: neither torch nor Megatron is imported before ``install()``.
"""

import warnings

# ``megatron_ext.install`` is a function for users and a module with the table behind it. Loaded
# here, once, the module cannot take the function's place later; runpy calls that unpredictable
# when the module is also run (python -m megatron_ext.install), which it is not.
warnings.filterwarnings(
    "ignore", message="'megatron_ext.install' found in sys.modules", category=RuntimeWarning
)

from megatron_ext.install import install, uninstall  # noqa: E402

__version__ = "0.1.0"

__all__ = ["__version__", "install", "uninstall"]
