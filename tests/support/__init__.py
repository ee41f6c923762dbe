"""What several files of tests share; each file here holds one thing and is named for it. Test files import no other test file."""
