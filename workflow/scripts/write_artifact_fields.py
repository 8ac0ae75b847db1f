"""Write the tables of the JSON artifacts' fields anew, from their records.

python -m workflow.scripts.write_artifact_fields
"""

from workflow.lib.artifacts.record_reference import write_page

if __name__ == "__main__":
    write_page()
