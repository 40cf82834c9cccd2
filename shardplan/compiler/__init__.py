"""From a model and a plan, as users give them, to findings or a Program.

| file | stage |
|---|---|
| inputs | the model and the plan file |
| overrides | keyword arguments over the plan's sections |
| variants | bind, check, prove layouts: for tensor parallel, and with the sequence-parallel overlay |
| program | lower |
"""
