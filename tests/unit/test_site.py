"""The site builds without a warning: files, pages and headings that links name exist, and so does what the reference names."""

from io import StringIO

import pytest
from sphinx.application import Sphinx

import pc
from helpers.tiny import ROOT


@pytest.mark.filterwarnings("ignore:.*Check CHANGES for Sphinx API modifications")  # for myst_parser
def test_the_site_builds_and_its_reference_has_every_public_name(tmp_path):
    warnings = StringIO()
    site = Sphinx(ROOT, ROOT / "docs", tmp_path, tmp_path, "dummy", status=None, warning=warnings)
    site.build()
    assert warnings.getvalue() == ""
    assert {f"pc.{name}" for name in pc.__all__} <= site.env.domaindata["py"]["objects"].keys()
