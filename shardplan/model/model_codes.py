"""The findings of this room: a model that does not exist, cannot be read or cannot be built; the plans `auto` and
`hf`."""

from shardplan.core.diagnostics import Code

NO_PATH = Code("SP501")
NOT_JSON = Code("SP502")
NO_MODEL_TYPE = Code("SP503")
UNKNOWN_TYPE = Code("SP504")
NOT_CACHED = Code("SP505")
OWN_CODE = Code("SP506")
NO_CALLABLE = Code("SP507")
BAD_CALLABLE = Code("SP508")
CANNOT_BUILD = Code("SP509")
UNKNOWN_SETTING = Code("SP510")
NO_PLAN = Code("SP511")
SEVERAL_PLANS = Code("SP512")
UNKNOWN_CLASS = Code("SP513")
NO_HF_PLAN = Code("SP514")
NO_OWN_INPUTS = Code("SP515")
OUTSIDE_ADAPTER = Code("SP516")
