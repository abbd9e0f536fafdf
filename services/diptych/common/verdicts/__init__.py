"""What all components decide alike: how they leave, whether they are well, when one starts again, and who may call.

Pure: facts and times in, verdicts out. What acts on them is elsewhere: `common.draining`, `common.health`,
`common.trust`, and the supervisors of the command line and of the router.
"""
