"""The writers of small models, for programs outside of the repository that know them here."""

from support.model_files import *  # noqa: F403
