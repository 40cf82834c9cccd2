"""The findings of this room: a model that does not exist, cannot be read or cannot be built; the plans `auto` and
`hf`."""

from shardplan.core.diagnostics import Code

NO_PATH = Code(
    "SP501",
    "no such model folder or file",
    "The word names a path (it has a path separator, or ends in `.json`), and there is no `config.json` to "
    "read there. A model is described by the `config.json` of its folder; weights are not needed.",
    bad="$ shardplan validate ./checkpoints/llama llama",
    good="$ shardplan validate ./checkpoints/llama-3.1-8b llama",
)
NOT_JSON = Code(
    "SP502",
    "a model configuration that cannot be read",
    "The file is not a JSON object in UTF-8, is nested too deeply, or is larger than any model configuration.",
    bad='{"model_type": "llama",',
    good='{"model_type": "llama"}',
)
NO_MODEL_TYPE = Code(
    "SP503",
    "a configuration without model_type",
    "`model_type` says which architecture of transformers the configuration describes; without it nothing "
    "can be built. It is never guessed from the other fields.",
    bad='{"hidden_size": 4096}',
    good='{"model_type": "llama", "hidden_size": 4096}',
)
UNKNOWN_TYPE = Code(
    "SP504",
    "an unknown model type",
    "The installed transformers has no architecture of that name. Name a model of your own as "
    "`module:callable`, and a folder in the current directory as `./folder`.",
    bad="$ shardplan validate lama llama",
    good="$ shardplan validate llama llama",
)
NOT_CACHED = Code(
    "SP505",
    "a hub id that is not in the local cache",
    "`org/name` is a repository of the Hugging Face hub. Its `config.json` is read from the local cache; "
    "shardplan downloads nothing. Fetch it once with `hf download org/name config.json`, or name a folder.",
    bad="$ shardplan validate meta-llama/Llama-3.1-8B llama",
    good="$ hf download meta-llama/Llama-3.1-8B config.json",
)
OWN_CODE = Code(
    "SP506",
    "a configuration that brings its own code",
    "`auto_map` in a `config.json` names Python code of the folder or of a hub repository, and an attention "
    "or expert implementation with a slash names a kernel repository. Neither runs unless you allow it.",
    bad="$ shardplan validate ./model-with-code llama",
    good="$ shardplan validate ./model-with-code llama --trust-remote-code",
)
NO_CALLABLE = Code(
    "SP507",
    "a model callable that does not exist",
    "`module:callable` imports the module, from the current directory or the Python path, and calls the name "
    "without arguments. The module could not be imported, or has no such callable.",
    bad="$ shardplan validate my_models:biuld plan.yaml",
    good="$ shardplan validate my_models:build plan.yaml",
)
BAD_CALLABLE = Code(
    "SP508",
    "a model callable that returns no model",
    "The callable raised an exception, or returned something that is not a `torch.nn.Module`. It is called on "
    "the meta device: no memory is used, and no values can be read.",
    bad="$ shardplan validate json:loads plan.yaml",
    good="$ shardplan validate my_models:build plan.yaml",
)
CANNOT_BUILD = Code(
    "SP509",
    "a model that cannot be built",
    "transformers refuses the configuration, or building the model from it fails. The note has the reason. Numbers of layers or experts that no machine could build, and dropout probabilities outside "
    "0 to 1, are refused before they are tried.",
    bad='{"model_type": "llama", "hidden_size": "4096"}',
    good='{"model_type": "llama", "hidden_size": 4096}',
)
UNKNOWN_SETTING = Code(
    "SP510",
    "an unknown configuration setting",
    "`--set name=value` changes one number, flag or word of the model's configuration; the configuration of "
    "this model has no setting of that name. Settings of a nested configuration are written with a dot.",
    bad="$ shardplan validate gpt2 gpt2 --set atn_pdrop=0",
    good="$ shardplan validate gpt2 gpt2 --set attn_pdrop=0",
)
NO_PLAN = Code(
    "SP511",
    "no built-in plan for the model",
    "`auto` chooses the one built-in plan whose `models` names the model's class, else its model type, and whose `for` holds. "
    "Without one it derives a plan, as `shardplan init` does. This error says that it may not: `derive=False`, `--no-derive`, or "
    "`--quick`, which runs no model. At tp 1 `auto` is data parallelism alone, of any model.",
    bad="$ shardplan validate t5 auto --tp 2 --no-derive",
    good="$ shardplan validate t5 auto --tp 2",
)
SEVERAL_PLANS = Code(
    "SP512",
    "several built-in plans for the model",
    "More than one plan names the model's class or model type, and has a `for` that holds or none, so `auto` cannot choose.",
    bad="$ shardplan validate llama auto",
    good="$ shardplan validate llama llama",
)
UNKNOWN_CLASS = Code(
    "SP513",
    "an architecture that transformers does not have",
    "`architectures` in the configuration names a class that the installed transformers does not have. The "
    "class that transformers has for the model type is used instead; its modules may be named differently.",
    bad='{"model_type": "llama", "architectures": ["LLaMAForCausalLM"]}',
    good='{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}',
)
NO_HF_PLAN = Code(
    "SP514",
    "a model without a tensor-parallel plan of its own",
    "`hf` reads the plan that transformers has for the architecture (`model.tp_plan`). This model has none.",
    bad="$ shardplan validate gpt2 hf",
    good="$ shardplan validate gpt2 gpt2",
)
NO_OWN_INPUTS = Code(
    "SP515",
    "a function for inputs, or for a reduced model, that cannot be loaded",
    "`--inputs module:callable` names a function that returns the inputs of the reduced model: (seed) -> keyword arguments of "
    "its `forward` (for a transformers model also (seed, reduced configuration)). `--reduced module:callable` "
    "names a function that builds the reduced model. The module could not be imported, or has no such callable.",
    bad="$ shardplan validate my_models:vision_tower my-plan.yaml --inputs my_models:bacth",
    good="$ shardplan validate my_models:vision_tower my-plan.yaml --inputs my_models:batch",
)
OUTSIDE_ADAPTER = Code(
    "SP516",
    "an adapter outside the model's layers",
    "peft injects some adapters (LoRA) into layers; they are split as these layers are. Other adapters (prompt tuning, prefix "
    "tuning) surround the model and change its inputs with parameters of their own. No rule of a plan can name those parameters.",
    bad="apply_plan(get_peft_model(model, PromptTuningConfig(...)), mesh, 'auto')",
    good="apply_plan(get_peft_model(model, LoraConfig(...)), mesh, 'auto')",
)

CODES = (
    NO_PATH,
    NOT_JSON,
    NO_MODEL_TYPE,
    UNKNOWN_TYPE,
    NOT_CACHED,
    OWN_CODE,
    NO_CALLABLE,
    BAD_CALLABLE,
    CANNOT_BUILD,
    UNKNOWN_SETTING,
    NO_PLAN,
    SEVERAL_PLANS,
    UNKNOWN_CLASS,
    NO_HF_PLAN,
    NO_OWN_INPUTS,
    OUTSIDE_ADAPTER,
)
