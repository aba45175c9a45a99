# launch/run.sh from Windows, in WSL2: launch\run.ps1 embedded --out /home/me/runs/first --steps 40
#
# The run computes in Linux, in the distribution that `wsl` starts by default (TANDEM_WSL names another one). The folder
# of the caller is the folder there, and an argument that is an absolute path of Windows becomes a path of Linux. So
# does a relative one that begins with .\ or ..\ or follows --out; elsewhere a backslash may mean something else. The
# exit code is that of run.sh. Left out on purpose: installing WSL, which needs an administrator and a restart.

function Stop-With([string] $Sentence) {
    [Console]::Error.WriteLine("error: $Sentence")
    exit 2
}

if (-not (Get-Command wsl.exe -ErrorAction SilentlyContinue)) {
    Stop-With ("Tandem runs on Linux, and this Windows has no WSL; run 'wsl --install' in a PowerShell of an " +
        "administrator, restart, and run this again.")
}

$chosen = @()
if ($env:TANDEM_WSL) { $chosen = @('--distribution', $env:TANDEM_WSL) }

# wsl.exe is there before any distribution is. With --exec no shell of Linux reads the words again.
$kernel = & wsl.exe @chosen --exec uname -r
if ($LASTEXITCODE -ne 0) {
    Stop-With ("WSL starts no Linux here; run 'wsl --install -d Ubuntu', or name a distribution of 'wsl --list' in " +
        "TANDEM_WSL, and run this again.")
}
if ("$kernel" -notmatch 'WSL2|microsoft-standard') {
    Stop-With ("this Linux ($kernel) is not one of WSL2; run 'wsl --set-version Ubuntu 2', with its name in " +
        "'wsl --list', and run this again.")
}

function ConvertTo-LinuxPath([string] $Path) {
    # wslpath takes both slashes, and a backslash at the end of a word would be read as part of a quote.
    & wsl.exe @chosen --exec wslpath -a ($Path -replace '\\', '/')
}

# Before 7.3, PowerShell drops the quotes inside of a word that it hands to a program.
$version = $PSVersionTable.PSVersion
$quote = if ($version.Major * 100 + $version.Minor -lt 703) { '\"' } else { '"' }

function ConvertTo-LinuxWord([string] $Word, [bool] $IsPath) {
    if ($Word -match '^[A-Za-z]:[\\/]') { return ConvertTo-LinuxPath $Word }
    if ($IsPath -or $Word -match '^\.\.?\\') { $Word = $Word -replace '\\', '/' }
    $Word -replace '"', $quote
}

# `a,b` without quotes is a list to PowerShell.
$before = ''
$words = @(foreach ($argument in $args) {
    $word = $argument -join ','
    if ($word -match '^--out=') { '--out=' + (ConvertTo-LinuxWord ($word.Substring(6)) $true) }
    else { ConvertTo-LinuxWord $word ($before -eq '--out') }
    $before = $word
})
$runner = ConvertTo-LinuxPath (Join-Path $PSScriptRoot 'run.sh')
if (-not $runner) {
    Stop-With "WSL cannot see $PSScriptRoot; put the clone on a local drive, or into WSL itself, and run this again."
}
& wsl.exe @chosen --exec bash $runner @words
exit $LASTEXITCODE
