"""Every dialect that a server has."""

from __future__ import annotations

from lmi_server.dialects.anthropic.dialect import ANTHROPIC
from lmi_server.dialects.lmi.dialect import LMI
from lmi_server.dialects.openai.dialect import OPENAI
from lmi_server.dialects.table import Dialect
from lmi_server.dialects.tei.dialect import TEI
from lmi_server.dialects.tgi.dialect import TGI

DIALECTS: tuple[Dialect, ...] = (LMI, OPENAI, ANTHROPIC, TGI, TEI)
