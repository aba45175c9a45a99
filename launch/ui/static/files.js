// The answers of a page that was written as files (launch/ui/bundle.py), as a process would give them.
//
// A browser loads no JSON from a folder without a server, but it loads scripts. So each file hands over one value:
// `tandem.put(NAME, VALUE)`. Nothing is kept but what the page shows.

const PROMPT_END = 300,
  AROUND = 60,
  MOST_FOUND = 60,
  SEARCH_MS = 1500;

export const bundle = globalThis.tandem ?? null;
const values = new Map();
if (bundle) bundle.put = (name, value) => values.set(name, value);

// `path` and `query` as for a process. What is wrong is `{ problem }`.
export async function answer(path, query) {
  const [, run, what, ...numbers] = path.split("/").map(decodeURIComponent);
  if (run !== bundle.run) return { problem: `There is no run '${run}' in these files; they have ${bundle.run} alone.` };
  if (what === "steps" && !numbers.length) return { ...bundle, stamp: "files" };
  if (what === "steps") return ofStep(numbers);
  if (what === "task") return { groups: (await load(`tasks/${query.task.slice(0, 2)}`))[query.task] };
  if (what === "search") return search(query.text, Number(query.first));
  return { problem: `These files have no answer to '${what}'; python -m launch ui has.` };
}

async function ofStep(texts) {
  const wrong = texts.find((text) => !/^\d{1,9}$/.test(text));
  if (wrong !== undefined) return { problem: `The address got '${wrong}', expected a whole number.` };
  const [step, number, place] = texts.map(Number);
  if (!bundle.steps.includes(step)) return { problem: `Step ${step} has no groups in these files.` };
  const { groups } = await load(`steps/${step}`);
  if (number === undefined)
    return { step, groups: groups.map((one) => ({ ...one, prompt: one.prompt.slice(-PROMPT_END) })) };
  const group = groups.find((one) => one.group === number);
  if (!group) return { problem: `Step ${step} has no group ${number} in these files.` };
  if (place === undefined) return group;
  if (!group.answers[place])
    return { problem: `That group has ${group.answers.length} answers; there is no answer ${place}.` };
  return (await load(`tokens/${step}-${number}`))[place];
}

async function search(text, first) {
  const wanted = text.toLowerCase(),
    began = Date.now(),
    hits = [];
  for (const step of bundle.steps.filter((one) => one >= first)) {
    if (hits.length >= MOST_FOUND || Date.now() - began > SEARCH_MS) return { hits, next: step };
    for (const group of (await load(`steps/${step}`)).groups) {
      const texts = [group.prompt, ...group.answers.map((one) => one.text)];
      texts.forEach((found, place) => {
        const at = found.toLowerCase().indexOf(wanted);
        if (at < 0) return;
        const around = found.slice(Math.max(0, at - AROUND), at + text.length + AROUND);
        hits.push({ step, group: group.group, sample: place ? place - 1 : null, text: around });
      });
    }
  }
  return { hits, next: null };
}

function load(name) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `data/${name}.js`;
    script.onload = () => {
      script.remove();
      resolve(values.get(name));
      values.delete(name);
    };
    script.onerror = () => {
      script.remove();
      reject(new Error(`data/${name}.js is missing`));
    };
    document.head.append(script);
  });
}
