"""What runs inside the sandbox: the zygote, its confinement, and the program. Standard library only.

`evals.grading.sandbox` starts `zygote.main` in a bare interpreter that sees this directory alone, as the top-level
package `jail`; hence the relative imports.
"""
