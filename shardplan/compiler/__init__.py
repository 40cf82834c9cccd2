"""From a model and a plan, as users give them, to findings or a Program.

| file | stage |
|---|---|
| pipeline | all stages in their order, each collecting its findings |
| user_inputs | the model, the mesh and the plan file, as users give them |
| early | what the plan and the checkpoint's files show before torch is imported |
| overrides | keyword arguments over the plan's sections |
| variants | bind, check, prove layouts: for tensor parallel, and with the sequence-parallel overlay |
| lowering_stage | lower |
"""
