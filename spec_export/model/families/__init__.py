"""Says which families of models are supported, and how their layers differ."""

from spec_export.model.families.family import EXPERTS as EXPERTS
from spec_export.model.families.family import FULL as FULL
from spec_export.model.families.family import SLIDING as SLIDING
from spec_export.model.families.family import Family as Family
from spec_export.model.families.family import LayerKind as LayerKind
from spec_export.model.families.family import Scale as Scale
from spec_export.model.families.family import capped as capped
from spec_export.model.families.family import has_tables_by_kind as has_tables_by_kind
from spec_export.model.families.table import FAMILIES as FAMILIES
from spec_export.model.families.table import require_known as require_known
